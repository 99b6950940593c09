"""HTTP/1.1 without tensors: connections, requests and errors on the wire."""
