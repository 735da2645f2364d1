# Somebody with a folder of pictures a class, one of which is no picture.
echo "no picture" > pets/cat/broken.jpg
fails python -m dptrain --data pets/ --image-size 16x16
grep "broken.jpg.*--bad-pictures" said
python -m dptrain --data pets/ --image-size 16x16 --bad-pictures skip --epochs 2 --out runs/pets
fails python -m dptrain predict runs/pets --data pets/ --out predictions.csv
grep "broken.jpg.*--bad-pictures" said
python -m dptrain predict runs/pets --data pets/ --out predictions.csv --bad-pictures skip
grep "dog/1.jpg" predictions.csv
python -m dptrain evaluate runs/pets --data pets/ --bad-pictures skip --json | grep confusion
