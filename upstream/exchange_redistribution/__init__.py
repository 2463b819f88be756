"""Patch 3: redistribution by one exchange."""
