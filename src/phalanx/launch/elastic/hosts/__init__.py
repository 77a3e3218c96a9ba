"""Elastic runs on several hosts: the first one's launcher decides, the others start, watch and end what is theirs."""
