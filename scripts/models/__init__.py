"""Model files of tests, benchmarks and the demo: random weights in real architectures, and the demo's trained model."""
