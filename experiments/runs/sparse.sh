# Single weights of the public ResNet20 and ResNet50: draws, lines (GPU; a stopped run goes on with --skip), pages, plots
python experiments/cifar.py data/cifar10.npz data/carry/draws.npz
R20="python experiments/sparse_resnet20.py"; RAW=data/sparse_raw; RES=experiments/results
$R20 report --removed --out $RAW/dense.csv
$R20 choose --device cuda --workers 8 --out $RAW/choose1.csv
$R20 choose --device cuda --workers 8 --only taylor oba oba-hessian oba-ggn --stages 5 --removed 0.5 0.8 0.9 --out $RAW/choose5.csv
$R20 report --device cuda --workers 8 --forms none max max+w l2+w --stages 1 --draws 1 2 --out $RAW/report1.csv
$R20 report --device cuda --workers 8 --only taylor oba oba-hessian oba-ggn --forms max+w max --stages 5 20 --skip $RES/sparse_resnet20.csv --out $RAW/report20.csv
$R20 report --device cuda --workers 8 --only obd-fisher --forms max+w max --stages 5 20 --removed 0.8 0.9 --skip $RES/sparse_resnet20.csv --out $RAW/obd20.csv
python experiments/sparse_lines.py $RES/sparse_choose.csv $RAW/choose*.csv
python experiments/sparse_lines.py $RES/sparse_resnet20.csv $RAW/dense.csv $RAW/report*.csv $RAW/obd20.csv
python experiments/sparse_lines.py $RES/sparse_resnet20.csv $RES/sparse_choose.csv --like $RES/sparse_resnet20.csv
python experiments/sparse_resnet50.py --device cuda --workers 4 --tf32 --draws 0 --saliencies paper plain --out $RAW/resnet50_a.csv
python experiments/sparse_lines.py $RES/sparse_resnet50.csv $RAW/resnet50_*.csv
python experiments/sparse_tables.py
