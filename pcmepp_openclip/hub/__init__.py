"""Models on the Hugging Face Hub: what a repo holds (`folder`, `card`), how it gets there (`upload`, `push`)."""
