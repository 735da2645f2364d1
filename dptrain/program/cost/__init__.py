"""Operations, bytes, messages, memory and time of a step on given hardware."""
