"""The terms of the training loss, and what makes them exact on many ranks."""
