"""Operations that stay one node in a lowered graph."""
