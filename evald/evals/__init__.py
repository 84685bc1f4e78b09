"""What is measured: data sets, prompts, sampling, graders, metrics, and the evaluator."""
