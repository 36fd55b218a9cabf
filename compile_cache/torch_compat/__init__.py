"""Facts about torch: flags that change results, private names, and out-of-memory errors."""
