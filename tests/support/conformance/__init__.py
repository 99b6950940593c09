"""ONNX's tests of its attention operators, run through exported layers."""
