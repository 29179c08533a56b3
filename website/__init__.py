"""The documentation site: what `make docs` adds to MkDocs, and how `make docs-test` looks at the result."""
