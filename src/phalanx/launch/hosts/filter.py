"""Whose packets reach a listening socket: a filter in the kernel, for listeners that ask nobody who they are.

Classic BPF, which any user may attach to a socket of their own. The filter is attached before the socket listens,
and connections that are accepted inherit it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct

_SO_ATTACH_FILTER = 26  # of <asm-generic/socket.h>; the socket module does not name it
_LOAD_WORD, _EQUALS, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K of <linux/bpf_common.h>
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: what follows is an offset from the IP header
_WHOLE_PACKET = 0xFFFFFFFF

Instruction = tuple[int, int, int, int]
"""Code, how far to jump if true, how far if false, value."""


def admit_only(listener: socket.socket, peers: set[str]) -> bool:
    """Have the kernel drop every packet to `listener` that does not come from one of `peers`.

    Not a proof of anything, since an address can be forged by who is on the way; it keeps everybody else from
    connecting at all. False when this system has no such filters, or the list is too long for them.
    """
    program = packet_filter(peers, ipv6=listener.family == socket.AF_INET6)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code, len(code))  # alive until the kernel has copied it
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(memory))
        )
    except OSError:
        return False
    return True


def packet_filter(peers: set[str], ipv6: bool) -> list[Instruction]:
    """The program that lets pass what `peers` send, and nothing else."""
    source_at = 8 if ipv6 else 12
    program: list[Instruction] = []
    for peer in sorted(peers):
        address = ipaddress.ip_address(peer.partition("%")[0])
        if (address.version == 6) != ipv6:
            continue
        words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
        for index, word in enumerate(words):
            program.append((_LOAD_WORD, 0, 0, _NETWORK_HEADER + source_at + 4 * index))
            # Unequal: jump over the rest of this address and over its "let pass".
            program.append((_EQUALS, 0, 2 * (len(words) - 1 - index) + 1, word))
        program.append((_RETURN, 0, 0, _WHOLE_PACKET))
    program.append((_RETURN, 0, 0, 0))
    return program
