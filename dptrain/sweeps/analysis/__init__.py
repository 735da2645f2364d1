"""What results of a sweep say: statistics, intervals, Pareto fronts, importance of fields."""
