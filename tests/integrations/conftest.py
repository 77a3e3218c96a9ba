"""Not part of `make test`: the frameworks live in an environment of their own (`make test-integrations`)."""

import os

collect_ignore_glob = [] if os.environ.get("PHALANX_INTEGRATIONS") == "1" else ["test_*.py"]
