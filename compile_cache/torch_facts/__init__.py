"""Facts about torch: flags that change results, private names, errors, attention kernels."""
