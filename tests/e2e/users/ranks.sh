# Somebody with several processes: the same numbers on one and two, a rank that fails, a job that is stopped and goes on.
python -m dptrain --data houses.csv --target price --epochs 2 --seed 3 --reproducible --out runs/one
mpirun -n 2 python -m dptrain --data houses.csv --target price --epochs 2 --seed 3 --reproducible --out runs/two
cmp runs/one/model.safetensors runs/two/model.safetensors
cat > fails.py <<'SCRIPT'
import dptrain as dp
if dp.rank() == 1:
    raise ValueError("no disk here")
dp.Sequential([dp.layers.Dense(1, input_shape=(2,))]).predict([[1.0, 2.0]])
SCRIPT
fails python -m dptrain launch -n 2 -- python fails.py
grep "rank 1/2 .*no disk here" said
python -m dptrain launch -n 2 -- python -m dptrain --data houses.csv --target price --epochs 100000 --out runs/long &
until [ -s runs/long/metrics.jsonl ]; do sleep 0.2; done
kill -USR1 $!
wait $! || test $? = 75
python -m dptrain runs | grep "long"
