"""The prefill node."""
