"""What the service tells of itself and writes down: metrics, logs, spans, audit, use, traces."""
