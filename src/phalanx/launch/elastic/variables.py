"""The environment variables by which a worker of an elastic run finds the meeting. Imports nothing."""

SOCKET = "PHALANX_ELASTIC_SOCKET"
"""The descriptor of its end of the socket to the launcher."""

NUMBER = "PHALANX_ELASTIC_NUMBER"
"""Its number among all workers that the run ever had."""

JOINS = "PHALANX_ELASTIC_JOINS"
"""Whether others train already."""

HOSTS = "PHALANX_ELASTIC_HOSTS"
"""Whether the run may have workers on several hosts."""

PAGE = "PHALANX_ELASTIC_PAGE"
"""The file in memory that it shares with the launcher."""
