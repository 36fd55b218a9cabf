"""What the nodes show: the report of the cache as a table and a chart, and the comparison of two images."""
