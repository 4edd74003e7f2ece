"""What the command lines of coding agents need to run whole inside a sandbox: their model, and a word that they are inside.

No package registry, no code host: those are also ways out for data, and which of them a project needs its owner knows. Add
them by `allow`, or in `[agents.NAME]` of your own policy file, which is laid over what stands here.
"""

from __future__ import annotations

from typing import Any

BUILT_IN: dict[str, dict[str, dict[str, Any]]] = {
    "claude-code": {
        "network": {"mode": "rules", "allow": ["api.anthropic.com:443", "cdn.anthropic.com:443"]},
        "environment": {"set": {"CLAUDE_CODE_SANDBOX": "cloche"}},
    },
    "codex": {
        "network": {"mode": "rules", "allow": ["api.openai.com:443", "cdn.openai.com:443"]},
        "environment": {"set": {"CODEX_SANDBOX": "cloche"}},
    },
    "gemini": {
        "network": {
            "mode": "rules",
            "allow": [
                "generativelanguage.googleapis.com:443",
                "aiplatform.googleapis.com:443",
                "cloudcode-pa.googleapis.com:443",
                "oauth2.googleapis.com:443",
            ],
        },
        "environment": {"set": {"SANDBOX": "cloche"}},
    },
}
