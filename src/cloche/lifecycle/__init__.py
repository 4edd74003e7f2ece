"""Pure decisions about the life of a sandbox: when it ends, and what its conditions say.

Functions over the nouns, without clock, store or machine: the caller passes in what it observed and acts on the answer.
The engine on one machine and a controller on a cluster ask the same functions, so a sandbox behaves the same in both
homes, and the rules are property-tested without either.
"""
