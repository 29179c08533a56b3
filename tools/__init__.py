"""What developers run from a checkout. None of it is part of the package."""
