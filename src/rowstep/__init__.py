"""Adam for embedding tables: a step costs the rows it touches, not the rows there are."""
