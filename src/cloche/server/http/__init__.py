"""HTTP: our own API under `/v1`, `/run`, and the rooms in which other people's wires hang.

operations   the table: what a handler's signature says, as data
wire         what JSON bodies look like where they differ from the nouns
doors        who calls: keys, peers, hosts and origins; a principal per request
answering    from a request to a handler and back: limits, errors, request ids, streams
routes/      the handlers, a file per noun
openapi      the table as a document
ports        the ports of sandboxes by path, by host name and as tunnels; proxy passes one request on, links signs the way in
terminals    a terminal over a WebSocket
serving      sockets, the drain, the lines that `cloche serve` prints
"""
