"""Estimators for scikit-learn: linear models that tune a penalty for each feature, and a cleaner of labels."""

from bilax.sklearn.cleaner import LabelCleaner
from bilax.sklearn.linear import TunedLogisticRegression, TunedRidge

__all__ = ["LabelCleaner", "TunedLogisticRegression", "TunedRidge"]
