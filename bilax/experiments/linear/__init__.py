"""The estimators of `bilax.sklearn` beside what scikit-learn has for the same."""
