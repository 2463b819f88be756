"""Shared by all tests; its place also puts this folder on the path, for `import enumeration`."""
