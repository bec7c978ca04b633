"""The command line: parses, calls, prints. No module here imports onnx or onnxruntime before a command needs it."""
