"""The search: space, bounds, exact values, proof; and around it sizes, fronts and near misses."""
