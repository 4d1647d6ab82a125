"""Data-parallel ranks that stay in step. See docs/dp.md."""
