"""Tests of tinsmith.service.backup."""
