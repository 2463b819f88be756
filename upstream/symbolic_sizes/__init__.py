"""Patch 2: exact propagation of view ops, of sizes that are symbols."""
