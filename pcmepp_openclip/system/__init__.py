"""Files, processes and secrets in text: nothing here knows a model."""
