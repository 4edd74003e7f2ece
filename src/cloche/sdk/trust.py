"""Whom a client believes to be the server: who shows a certificate of an authority in `CLOCHE_CA_FILE`, or else in the system's store."""

from __future__ import annotations

import os
import ssl

from cloche import errors


def context(url: str, ca_file: str | None) -> ssl.SSLContext | None:
    """None for a server that is spoken to in the open."""
    if not url.startswith("https:"):
        return None
    if ca_file is not None and not os.path.isfile(ca_file):
        raise errors.error(
            "settings_invalid",
            f"CLOCHE_CA_FILE is {ca_file!r}, which is not a file",
            hint="name a PEM file of certificates",
        )
    try:
        made = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as problem:
        raise errors.error(
            "settings_invalid",
            f"CLOCHE_CA_FILE {ca_file!r} cannot be used: {problem}",
            hint="it is a PEM file of certificates",
        ) from None
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    return made


def distrusted(url: str, problem: ssl.SSLError) -> errors.ClocheError:
    why = getattr(problem, "verify_message", "") or problem.reason or str(problem)
    return errors.error(
        "server_unavailable",
        f"{url}: no connection that can be trusted ({why})",
        hint="set CLOCHE_CA_FILE to the certificate of the authority that signed the server's",
    )
