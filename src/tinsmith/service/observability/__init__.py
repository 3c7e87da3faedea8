"""Metrics, logs, OpenTelemetry spans, audit log, usage reports and Perfetto traces."""
