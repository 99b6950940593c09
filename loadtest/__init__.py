"""
The load tester: true latency of attention under load, over shape, weights, wire format and rate.

It knows Headwise from outside only, as any client does, and any other server of the Open
Inference Protocol v2 as well.  Of the service it imports the parity rule (numpy alone) and, in
`oracle` only, the engine; nothing of the exporter, the laboratory or the tests.
"""
