"""Facts about torch: flags that change results, private names, and which errors mean a lack of memory."""
