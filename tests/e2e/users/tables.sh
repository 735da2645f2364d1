# A data scientist with a table: trains, meets a slip, predicts new rows, one of which has a town that training has not seen.
python -m dptrain --data houses.csv --target price --epochs 2 --out runs/houses
fails python -m dptrain --data houses.csv --target prize
grep "did you mean 'price'" said
fails python -m dptrain predict runs/houses --data new.csv --out predictions.csv
grep "category 'Oslo'.*see --unseen" said
python -m dptrain predict runs/houses --data new.csv --out predictions.csv --unseen other
test "$(wc -l < predictions.csv)" = 4
python -m dptrain evaluate runs/houses | grep "rmse"
python -m dptrain --data houses.csv --target town --class-weight balanced --epochs 2 --out runs/towns
python -m dptrain evaluate runs/towns | grep "F1"
python -m dptrain runs --sort val_loss | grep "houses"
