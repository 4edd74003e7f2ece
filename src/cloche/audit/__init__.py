"""The audit log: who did what, kept so that a change to it shows.

    $CLOCHE_HOME/audit/20261115T130001-4711-90210-0001.open     a writer's segment; `.jsonl` once its last word is signed
    $CLOCHE_HOME/audit/manifest.jsonl                           which segments there are, their signed lengths and heads
    $CLOCHE_HOME/keys/audit.key, audit.pub                      Ed25519

The log is a second follower of the journal: every event becomes one line, and every line holds the hash of the one before.
That finds edits and gaps; it does not find a missing end, so length and head are signed every 1,000 lines, on rotation and
on close, into a manifest that is itself such a chain. A segment names the manifest's lines about it, and the manifest names all
segments, so neither can lose its end or a whole file alone.

What it cannot do: whoever has the key (the owner of the state directory, root) can write another history, and whoever can set the
whole directory back to an earlier copy is not noticed, unless somebody kept a manifest head elsewhere (`verify --head`).

`lines` and `masking` are pure; `writing` is what an engine holds; `reading` and `verifying` only read. The engine knows
`interfaces.Audit`. design/0013 has the reasons.
"""
