"""Copies and socket calls in C, without the interpreter's lock; each has a plain way beside it for where C is not."""
