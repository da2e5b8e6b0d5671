"""The parts of `examples/demo.py`: a GPT trained by DeepSpeed, resumed under other layouts, compared bit by bit."""
