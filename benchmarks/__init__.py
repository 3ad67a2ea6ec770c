"""The claims of speed and memory, measured side by side: `python -m benchmarks [NAME ...]`."""
