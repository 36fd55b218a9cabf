"""The report of the cache as a table and a chart, and the comparison of two images, as the nodes show them."""
