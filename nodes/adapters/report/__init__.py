"""The texts and pictures that people see: the report, the latest runs, Compare Images, Measure against stock."""
