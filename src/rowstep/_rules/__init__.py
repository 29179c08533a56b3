"""The rules of an update, as text that tensors, arrays and compiled scalars share. Nothing in here imports torch."""
