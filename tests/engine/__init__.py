"""The engine against independent references: plain transformers, PEFT and torch."""
