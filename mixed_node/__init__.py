"""The mixed node: both halves of a request over one region."""
