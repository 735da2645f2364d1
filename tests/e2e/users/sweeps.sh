# A researcher who compares settings over seeds, stops the sweep, lets it go on and reads what is kept.
sweep() { python -m dptrain sweep --data houses.csv --target price --epochs 3 --out sweep "$@"; }
sweep --seeds 0-1 --grid learning_rate=1e-3,1e-2 --max-time 0s || test $? = 75
sweep --seeds 0-1 --grid learning_rate=1e-3,1e-2
sweep --seeds 0-2 --grid learning_rate=1e-3,1e-2 --verbose 2 | grep "run 6/6"
test "$(wc -l < sweep/trials.csv)" = 3
grep "What was found" sweep/report.html
python -m dptrain evaluate "$(ls sweep/models/*.keras | head -1)" --data houses.csv
python -m dptrain sweep --data houses.csv --target price --epochs 4 --seeds 0 --halving 2 \
  --grid learning_rate=1e-4,1e-3,1e-2,1e-1 --out halved --verbose 2 | grep "rung at 1 epoch.*continues"
