"""What the workers of `phalanx doctor` do: `host` on the CPU, `device` on a device each."""
