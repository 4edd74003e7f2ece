"""What leaves a sandbox: the one process that lets traffic through, by the rules of policy/rules.py.

    http, socks, tls, dns   parsers without sockets: bytes in, a small fact or a refusal out           (pure)
    capture   inside a sandbox's network namespace: the listeners, the route, the nftables rules
    credentials, masking    what goes in for a placeholder, and what comes out of an answer again              (pure)
    authority, channel, inspection    requests that are read on their way: our certificates, TLS, the exchange
    relay, upstream, proxy  the process outside: accept, decide, resolve, check, dial, move bytes
    records   what engine and proxy say to each other
    process   the engine's side: starts the proxy, keeps duplicates of the listeners, starts it again

A sandbox's namespace has no interface but loopback, so nothing here is what *stops* traffic: with every piece of this
room missing there is no network. Nothing is imported from this file; `capture` is used by the launcher, which has the
standard library only.
"""
