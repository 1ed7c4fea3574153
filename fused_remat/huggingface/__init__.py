"""Layers of Hugging Face transformers as blocks. Nothing here imports transformers by itself."""
