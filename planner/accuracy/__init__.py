"""How far the planner's numbers are from published measurements: reads a folder of CSV files, predicts every row, never fits."""
