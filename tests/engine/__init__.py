"""Tests of the engine against independent references: plain transformers, PEFT and torch."""
